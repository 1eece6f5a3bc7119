"""Ports and interfaces of the machine that this runs on. Nothing but the standard library."""

from __future__ import annotations

import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915


def free_port(wanted: int | None) -> int:
    """`wanted`, or 0 if something listens there already; without a wish one that is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", wanted or 0))
            probe.listen()
        except OSError:
            return 0
        return int(probe.getsockname()[1])


def reaches(host: str, port: int, seconds: float) -> str | None:
    """None, or why a connection from here to host:port fails."""
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def interface_of(address: str) -> str | None:
    """Name of the interface with this IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(query, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
