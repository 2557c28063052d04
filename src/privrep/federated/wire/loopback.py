"""Addresses of this machine alone."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Return whether data sent to this host stays on this machine; of names, localhost alone is taken to."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
