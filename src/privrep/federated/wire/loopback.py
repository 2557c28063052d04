"""Which addresses are of this machine alone."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether what is sent to this host stays on this machine. Of names, localhost alone is taken to."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
