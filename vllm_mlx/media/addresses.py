"""Which network addresses are on the public internet. Resolves nothing."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

# IANA's special-purpose registries: what is not forwarded everywhere, or is not one host.
_SPECIAL_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
            "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24",
            "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
        ),
    )
)  # fmt: skip
_UNICAST_V6 = IPv6Network("2000::/3")  # all that is assigned to hosts
_SPECIAL_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
_NAT64 = IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = IPv6Network("2002::/16")
_MAPPED = IPv6Network("::ffff:0:0/96")
_ISATAP = (0x00005EFE, 0x02005EFE)  # the upper half of the interface identifier; the lower is an IPv4 address


def is_public(text: str) -> bool:
    """Whether `text`, an address in numbers, is a host on the public internet. No address is not public."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    return _is_public_v4(address) if isinstance(address, IPv4Address) else _is_public_v6(address)


def _is_public_v4(address: IPv4Address) -> bool:
    return not any(address in network for network in _SPECIAL_V4)


def _is_public_v6(address: IPv6Address) -> bool:
    """An address that carries an IPv4 one leads there, and counts as that one."""
    value = int(address)
    low = IPv4Address(value & 0xFFFFFFFF)
    if address in _MAPPED or address in _NAT64:
        return _is_public_v4(low)
    if address in _SIX_TO_FOUR:
        return _is_public_v4(IPv4Address(value >> 80 & 0xFFFFFFFF))
    if value >> 32 & 0xFFFFFFFF in _ISATAP and not _is_public_v4(low):
        return False
    return address in _UNICAST_V6 and not any(address in network for network in _SPECIAL_V6)
