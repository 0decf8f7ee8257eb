"""The control channel between two ranks: JSON messages over TCP, once both ends have proven that they know a secret.

It uses the framing and the mutual challenge of `multiprocessing.connection`, and never its pickle. Each message has a
tag, which only ends that know the secret can compute: its contents can be read on the way, not changed. It knows no
plan.
"""

import hmac
import json
import logging
import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, cast

from ..core.errors import ConfigError, setting
from ..util.faults import RanksParted

logger = logging.getLogger(__name__)
MAX_BYTES = 1 << 26  # of one message; a prompt of a million tokens has 8 MB
MIN_SECRET = 16  # characters
_PROOF_S = 5.0  # for the proof of the secret; a visitor who takes longer is disconnected
_MAX_VISITORS = 16  # who prove the secret at the same time
RETRY_S = 0.5  # between two tries to join
_NO_MESSAGE = "what it has sent is not a message of this version of vllm-mlx, or was changed on its way"
_TAG_BYTES = 32  # before each message
Message = dict[str, Any]


class Lost(RanksParted):
    """The peer is gone: its connection ended, it says nothing, or it sent something other than a message."""


class _Recorded:
    """A connection that records the messages of both ends in turn, while they prove the secret."""

    def __init__(self, connection: "Connection[bytes, bytes]"):
        self._connection, self.record = connection, b""

    def send_bytes(self, data: bytes) -> None:
        self._connection.send_bytes(data)
        self.record += data

    def recv_bytes(self, max_bytes: int) -> bytes:
        data = self._connection.recv_bytes(max_bytes)
        self.record += data
        return data


class _Tags:
    """The tags of one direction: each depends on the secret, both challenges, and the number of tags before it."""

    def __init__(self, key: bytes = b""):
        self._key, self._num = key, 0

    def next(self, data: bytes) -> bytes:
        self._num += 1
        return hmac.digest(self._key, self._num.to_bytes(8, "big") + data, "sha256")


class Channel:
    """One end of a connection to a peer that knows the secret. Any thread may `say`; one thread hears."""

    def __init__(self, sock: socket.socket):
        """`sock` is connected."""
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._connection: Connection[bytes, bytes] = Connection(os.dup(sock.fileno()))
        self._saying = threading.Lock()
        self._own_tags, self._peer_tags = _Tags(), _Tags()
        self.host: str = sock.getsockname()[0]  # this end's address
        self.peer: str = sock.getpeername()[0]  # the other end's
        self.name = self.peer  # of the peer, for messages

    def prove(self, secret: bytes, *, first: bool) -> "Channel":
        """Let both ends prove the secret; one of them asks `first`. Raises AuthenticationError, OSError, EOFError."""
        timer = threading.Timer(_PROOF_S, self.close)
        timer.daemon = True
        timer.start()
        recorded = _Recorded(self._connection)
        with ExitStack() as undone:
            undone.callback(self.close)
            try:
                for challenge in (deliver_challenge, answer_challenge)[:: 1 if first else -1]:
                    challenge(cast("Connection[bytes, bytes]", recorded), secret)
            except AssertionError as error:  # Python 3.11 asserts that it reads a challenge
                raise OSError("it speaks another protocol") from error
            finally:
                timer.cancel()
            undone.pop_all()
        tags = [_Tags(hmac.digest(secret, name + recorded.record, "sha256")) for name in (b"first", b"second")]
        self._own_tags, self._peer_tags = tags if first else reversed(tags)
        return self

    def say(self, message: Message) -> int:
        """Send a message, from any thread. Returns its number of bytes. Raises Lost."""
        data = json.dumps(message, separators=(",", ":")).encode()
        assert len(data) <= MAX_BYTES - _TAG_BYTES, "the peer would not read it"
        try:
            with self._saying:
                self._connection.send_bytes(self._own_tags.next(data) + data)
        except OSError as error:
            raise Lost(f"{self.name} is lost: {_reason(error)}.") from error
        return len(data)

    def hear(self, timeout_s: float | None = None) -> Message:
        """Wait for the next message. Raises Lost, also if none begins within `timeout_s`."""
        try:
            if timeout_s is not None and not self._connection.poll(timeout_s):
                raise Lost(f"{self.name} is lost: it has said nothing for {timeout_s:g} s.")
            received = self._connection.recv_bytes(MAX_BYTES)
            tag, data = received[:_TAG_BYTES], received[_TAG_BYTES:]
            if not hmac.compare_digest(tag, self._peer_tags.next(data)):
                raise ValueError
            message: Message = json.loads(data)
            if not isinstance(message, dict):
                raise ValueError
        except (EOFError, OSError, ValueError, RecursionError) as error:
            raise Lost(f"{self.name} is lost: {_reason(error)}.") from error
        return message

    def close(self) -> None:
        """End the connection. A thread that hears on it gets Lost."""
        with suppress(OSError):  # it had ended before
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it has closed the connection" if isinstance(error, EOFError) else _NO_MESSAGE


class Door:
    """Listens for peers on one address of this machine. Each visitor proves the secret on a separate thread."""

    def __init__(self, host: str, port: int, secret: bytes):
        """Listen on a port; 0 means any free one. Raises ConfigError."""
        self._secret = secret
        self._admitted: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._visitors = threading.Semaphore(_MAX_VISITORS)
        self._sock = _listen(host, port)
        self._sock.settimeout(RETRY_S)
        self.host, self.port = self._sock.getsockname()
        threading.Thread(target=self._receive, name="door", daemon=True).start()

    def accept(self, timeout_s: float | None = None) -> Channel:
        """Wait for a peer that has proven the secret. Raises TimeoutError."""
        try:
            return self._admitted.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None

    def close(self) -> None:
        """Stop to listen. Peers that joined stay connected."""
        self._sock.close()

    def _receive(self) -> None:
        while self._sock.fileno() != -1:
            with suppress(OSError):  # no visitor came for a while, or a visitor has left
                visitor, address = self._sock.accept()
                if self._visitors.acquire(blocking=False):
                    threading.Thread(
                        target=self._admit, args=(visitor, address[0]), name="visitor", daemon=True
                    ).start()
                else:
                    visitor.close()

    def _admit(self, visitor: socket.socket, host: str) -> None:
        try:
            self._admitted.put(Channel(visitor).prove(self._secret, first=True))
        except AuthenticationError:
            what = "The worker at %s has another secret and was refused. Copy the file of %s to it, and start it again."
            logger.warning(what, host, setting("secret_file"))
        except (OSError, EOFError) as error:
            logger.debug("A visitor did not prove the secret: %s", error)
        finally:
            self._visitors.release()


def join(
    host: str, port: int, secret: bytes, timeout_s: float | None = None, tell: Callable[[str], None] = logger.debug
) -> Channel:
    """Connect to a door, and try again until it opens. `tell` gets each new reason why it waits.

    Raises ConfigError if the door knows another secret, and Lost after `timeout_s`.
    """
    start_s, told = time.monotonic(), ""
    while True:
        try:
            return Channel(socket.create_connection((host, port), timeout=_PROOF_S)).prove(secret, first=False)
        except AuthenticationError as error:
            advice = f"Give both sides a copy of one file with {setting('secret_file')}."
            raise ConfigError(f"The server at {host}:{port} has another secret. {advice}") from error
        except (OSError, EOFError) as error:
            reason = f"{host}:{port} does not answer, or has all its workers ({_reason(error)})."
        if timeout_s is not None and time.monotonic() - start_s >= timeout_s:
            raise Lost(reason)
        if reason != told:
            tell(told := reason)
        time.sleep(RETRY_S)


def _listen(host: str, port: int) -> socket.socket:
    try:
        address = socket.gethostbyname(host)  # MLX takes IPv4 addresses only
        if ip_address(address).is_unspecified:
            raise OSError("it is not one address")
        return socket.create_server((address, port))
    except OSError as error:
        reason = _reason(error).partition(" (")[0]  # Python adds the address
        raise ConfigError(
            f"Workers cannot join at {host}:{port} ({reason}): {setting('worker_host')} is an IPv4 address of this "
            f"machine that the other Macs reach, and {setting('worker_port')} a free port below 32768."
        ) from error


def read_secret(path: Path) -> bytes:
    """Read the secret that all ranks share. Raises ConfigError unless its owner alone can read the file."""
    how = f"Write one with `(umask 077; openssl rand -hex 32 >{path})`, and copy the file to each Mac."
    try:
        with path.expanduser().open("rb") as stream:
            mode, secret = stat.S_IMODE(os.fstat(stream.fileno()).st_mode), stream.read(1 << 16).strip()
    except OSError as error:
        raise ConfigError(f"Cannot read the secret in {path}: {error.strerror}. {how}") from error
    if mode & 0o077:
        raise ConfigError(f"Other users may open {path} (its mode is {mode:03o}). Run `chmod 600 {path}`.")
    if len(secret) < MIN_SECRET:
        raise ConfigError(f"The secret in {path} has {len(secret)} characters, of {MIN_SECRET} at least. {how}")
    return secret
