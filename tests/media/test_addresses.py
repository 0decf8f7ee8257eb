"""No spelling of an address that is not public passes for one that is."""

import asyncio
import socket
import ssl
from ipaddress import IPv4Address, IPv6Address, ip_address

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_mlx.core.config import MediaConfig
from vllm_mlx.core.errors import InvalidImage
from vllm_mlx.media.fetch import MediaFetcher, is_public

SSL = ssl.create_default_context()
PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.215.14", "2606:4700:4700::1111", "2a00:1450:4001:82b::200e", "64:ff9b::8.8.8.8",
          "::ffff:8.8.8.8", "2002:808:808::1"]  # fmt: skip
PRIVATE = [
    "127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1",
    "169.254.169.254", "169.254.0.1", "100.64.0.1", "100.127.255.255", "192.0.0.8", "192.0.2.1", "192.88.99.1",
    "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "224.0.1.1", "239.255.255.250", "240.0.0.1",
    "255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::10.0.0.1",
    "64:ff9b::169.254.169.254", "64:ff9b:1::8.8.8.8", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::1",
    "2002:a9fe:a9fe::1", "2002:c0a8:101::", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fd12:3456::1", "fe80::1",
    "fe80::1%1", "fec0::1", "ff02::1", "ff0e::1", "2a00::5efe:10.0.0.1", "2a00::200:5efe:127.0.0.1", "4000::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", [*PRIVATE, "", "localhost", "127.1", "0x7f000001", "1.1.1.1\n", "1.1.1.1/8"])
def test_not_public(address: str) -> None:
    assert not is_public(address)


@given(st.ip_addresses())
@example(IPv4Address("192.31.196.1"))
def test_nothing_passes_that_the_standard_library_calls_private(address: IPv4Address | IPv6Address) -> None:
    if is_public(str(address)):
        assert not (address.is_private or address.is_loopback or address.is_link_local or address.is_multicast
                    or address.is_unspecified or address.is_reserved) or isinstance(address, IPv6Address)  # fmt: skip
        assert address.is_global or _carries_public(address)


def _carries_public(address: IPv4Address | IPv6Address) -> bool:
    """An IPv6 address that stands for an IPv4 one is as public as that is."""
    assert isinstance(address, IPv6Address)
    inner = address.ipv4_mapped or address.sixtofour or IPv4Address(int(address) & 0xFFFFFFFF)
    return is_public(str(inner))


def spellings(address: IPv4Address) -> list[str]:
    """Everything that a resolver takes for this address."""
    number, (a, b, c, d) = int(address), address.packed
    return [
        str(address),
        str(number),
        f"0x{number:x}",
        f"0X{number:X}",
        f"0{number:o}",
        f"{a}.{number & 0xFFFFFF}",
        f"{a}.{b}.{c << 8 | d}",
        f"0x{a:x}.0{b:o}.{c}.{d}",
        f"{a:04o}.{b:04o}.{c:04o}.{d:04o}",
        f"[::ffff:{address}]",
        f"[::ffff:{a:x}{b:02x}:{c:x}{d:02x}]",
        f"[64:ff9b::{address}]",
        f"[2002:{a:02x}{b:02x}:{c:02x}{d:02x}::1]",
        f"[::{address}]",
        "".join(chr(0xFF10 + int(char)) if char.isdigit() else "。" for char in str(address)),
    ]


NETWORKS = [(0x0A000000, 8), (0x7F000000, 8), (0xAC100000, 12), (0xC0A80000, 16), (0xA9FE0000, 16), (0x64400000, 10),
            (0x00000000, 8), (0xE0000000, 4), (0xF0000000, 4)]  # fmt: skip


@given(st.sampled_from(NETWORKS), st.integers(0, 2**32 - 1))
@example((0x7F000000, 8), 1)
@example((0xA9FE0000, 16), 0xA9FE)
def test_no_spelling_of_a_private_address_is_fetched(network: tuple[int, int], host: int) -> None:
    """By the system's own resolver; nothing is ever sent, since every spelling is refused or is no host."""
    start, length = network
    address = IPv4Address(start | host & (2 ** (32 - length) - 1))

    async def check() -> None:
        web = MediaFetcher(MediaConfig(), ssl_context=SSL)
        for spelling in spellings(address):
            with pytest.raises(InvalidImage, match=r"there is no host|not on the public internet|not a valid URL"):
                await web.fetch(f"http://{spelling}/a.png")

    asyncio.run(check())


@pytest.mark.parametrize("spelling", ["127.1", "0x7f000001", "2130706433", "017700000001", "localhost"])
def test_the_system_does_know_these_spellings(spelling: str) -> None:
    """So the test above is refused by the address, and not for want of one."""
    found = {ip_address(str(entry[4][0])) for entry in socket.getaddrinfo(httpx.URL(f"http://{spelling}").host, 80)}
    assert found & {ip_address("127.0.0.1"), ip_address("::1")}
