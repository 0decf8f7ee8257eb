"""Tells which network addresses are hosts on the public internet. Resolves no names."""

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

# IANA's special-purpose registries: networks that `is_global` of some versions of Python, or parts of them, lets pass.
_SPECIAL = tuple(map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "3fff::/20")))
_UNICAST_V6 = IPv6Network("2000::/3")  # everything that is assigned to hosts
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)  # the upper half of the interface identifier; the lower is an IPv4 address


def is_public(text: str) -> bool:
    """Whether `text` is the numeric address of a host on the public internet. False if it is no address."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    return _is_global(address) if isinstance(address, IPv4Address) else _is_public_v6(address)


def _is_global(address: IPv4Address | IPv6Address) -> bool:
    return address.is_global and not address.is_multicast and not any(address in network for network in _SPECIAL)


def _is_public_v6(address: IPv6Address) -> bool:
    """An address that contains an IPv4 address leads there, and counts as that address."""
    value = int(address)
    low = IPv4Address(value & 0xFFFFFFFF)
    if address.ipv4_mapped is not None or address in _NAT64:
        return _is_global(low)
    if address.sixtofour is not None:
        return _is_global(address.sixtofour)
    if value >> 32 & 0xFFFFFFFF in _ISATAP and not _is_global(low):
        return False
    return address in _UNICAST_V6 and _is_global(address)
