"""The listening socket, bound before anything heavy is loaded. Imports nothing heavy itself."""

import errno
import socket


class PortInUseError(RuntimeError):
    """Another process has the port; the message names it."""


def bind(host: str, port: int) -> socket.socket:
    """Bind a TCP socket, not listening yet, so that clients are refused until the server is ready.

    The address is first taken without SO_REUSEADDR: two sockets that both set it may share an
    address until one listens, and a second server would find out only after it had loaded its
    model. A server that has just ended leaves connections behind that make this fail, so then it is
    tried with the option, which a socket that listens still refuses.

    Raises:
        PortInUseError: the port is taken.
        OSError: the host is unknown or the address cannot be used.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    for reuse in (False, True):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            sock.bind(address)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        return sock
    raise PortInUseError(f"port {port} on {host} is already in use: choose another with --port")


def before_listening(sock: socket.socket) -> None:
    """To be called when the socket is about to listen.

    Connections inherit SO_REUSEADDR; without it those that linger would block a restart.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)


def url(host: str, port: int) -> str:
    """The address at which a client on this machine reaches a server that listens there."""
    if host in ("", "0.0.0.0"):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
