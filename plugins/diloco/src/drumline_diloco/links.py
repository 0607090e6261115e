"""Connections between hosts that train by themselves, and the choice of their leader.

Any host may come or go, and none waits for another. Each listens at its entry of `strategy.peers`,
and leads until it follows. A host without a leader looks for one every few seconds: another host
takes it if that one leads and has done more outer steps (or as many, and stands before it in the
list). If a broken network has left two groups with a leader each, they become one again in this
way. A follower whose leader has gone leads, and the others find it, or it finds them.

Both sides prove that they know a secret (HMAC, `multiprocessing.connection`). What is sent is not
encrypted: a header in JSON, and bytes.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from typing import Any, NamedTuple

import torch

from drumline.errors import ConfigError
from drumline.system.network import addresses, is_here, is_loopback
from drumline.system.sockets import serve_callers, wait_at_most

log = logging.getLogger(__name__)
# Between two searches for a leader.
LOOK_SECONDS = 3.0
CONNECT_SECONDS = 5.0
# How long an answer to a greeting may take: the other host may be within an optimizer step.
ANSWER_SECONDS = 30
# Only reads have a time limit of their own. Writes are limited by SILENT_SECONDS.
READS = (socket.SO_RCVTIMEO,)
# A host counts as gone if neither it nor its kernel has acknowledged what was sent for so long.
SILENT_SECONDS = 10
# Messages that wait for one host. A host that takes none is given up.
MOST_WAITING = 200
# Bytes of a header, and of a payload.
LONGEST_HEADER = 2**20
LONGEST = 2**36
WHERE = "strategy.peers"
# Options that let the kernel find out whether the other side has gone. Some are Linux's.
SOCKET_OPTIONS = (
    ("SO_KEEPALIVE", 1),
    ("TCP_NODELAY", 1),
    ("TCP_KEEPIDLE", SILENT_SECONDS // 2),
    ("TCP_KEEPINTVL", 2),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 1000 * SILENT_SECONDS),
)


class Message(NamedTuple):
    """A header, and a payload uint8[N] or None."""

    header: dict[str, Any]
    payload: torch.Tensor | None


class Link:
    """A connection. One thread receives, and the link's own thread sends what any thread queues."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: queue.Queue[Message | None] = queue.Queue()
        threading.Thread(target=self._write, daemon=True, name="drumline-peer").start()

    def send(self, header: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        """Queue a message without waiting.

        If the other side has gone, the thread that receives notices the loss.
        """
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(Message(header, payload))
        else:
            self.close()

    def receive(self) -> Message | None:
        """Return the next message; None if the other side has gone, or sent something else."""
        payload = None
        try:
            header = json.loads(self._connection.recv_bytes(LONGEST_HEADER))
            if header["bytes"]:
                payload = self._connection.recv_bytes(LONGEST)
        except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError):
            return None
        if payload is None:
            return Message(header, None)
        return Message(header, torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def remove_limit(self) -> None:
        """Let later messages take any time."""
        with socket.socket(fileno=self._connection.fileno()) as ends:
            wait_at_most(ends, 0, READS)
            ends.detach()

    def close(self) -> None:
        """Close the connection. A thread that is receiving gets None."""
        self._waiting.put(None)
        with suppress(OSError), socket.socket(fileno=self._connection.fileno()) as ends:
            with suppress(OSError):
                ends.shutdown(socket.SHUT_RDWR)
            ends.detach()

    def _write(self) -> None:
        """Send messages until `close`, or until the other side has gone."""
        while True:
            message = self._waiting.get()
            if message is None:
                return
            size = 0
            if message.payload is not None:
                size = message.payload.numel()
            header = json.dumps({**message.header, "bytes": size})
            try:
                self._connection.send_bytes(header.encode())
                if message.payload is not None:
                    self._connection.send_bytes(message.payload.cpu().numpy().data)
            except OSError:
                return


class WrongSecret(ConnectionError):
    """The other side is a Drumline host with another secret."""


def greet(connected: socket.socket, secret: bytes, calls: bool) -> Connection:
    """Return an authenticated connection.

    `calls`: this side has called. Raises WrongSecret, and OSError if the other side is no host of
    Drumline's, or does not answer.
    """
    for option, value in SOCKET_OPTIONS:
        if not hasattr(socket, option):
            continue
        level = socket.IPPROTO_TCP
        if option.startswith("SO_"):
            level = socket.SOL_SOCKET
        connected.setsockopt(level, getattr(socket, option), value)
    connected.settimeout(None)
    wait_at_most(connected, ANSWER_SECONDS, READS)
    connection = Connection(connected.detach())
    try:
        if calls:
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
        else:
            deliver_challenge(connection, secret)
            answer_challenge(connection, secret)
    except AuthenticationError as error:
        connection.close()
        raise WrongSecret("it has another strategy.secret") from error
    except (EOFError, AssertionError, OSError) as error:
        connection.close()
        raise ConnectionError("who is there is none of ours") from error
    return connection


def listen(peers: list[str]) -> tuple[int, socket.socket]:
    """Return the number of this host's entry, and a socket that listens there.

    It is the first entry that is an address of this host and free. Raises ConfigError, also if the
    name of this host is loopback here, as in Debian's /etc/hosts, and those of others are not.
    """
    has_other_hosts = _has_other_hosts(peers)
    are_taken = False
    for number, peer in enumerate(peers):
        host, port = split_peer(peer)
        for address in addresses(host):
            if not is_here(address):
                continue
            if has_other_hosts and is_loopback(address):
                raise ConfigError(
                    f"{host} is {address} here, which no other host reaches",
                    where=WHERE,
                    fix="name an IP address, or give the host its address in /etc/hosts",
                )
            family = socket.AF_INET
            if ":" in address:
                family = socket.AF_INET6
            try:
                return number, socket.create_server((address, port), family=family)
            except OSError:
                are_taken = True

    what = "none of them is an address of this host"
    if are_taken:
        what = "the ports of this host are taken"
    raise ConfigError(
        f"{what}: {', '.join(peers)}",
        where=WHERE,
        fix="name each host once, with a free port: [a:29600, b:29600]",
    )


def _has_other_hosts(peers: list[str]) -> bool:
    """Return whether some entry is not a loopback address."""
    for peer in peers:
        host, _ = split_peer(peer)
        first_address = addresses(host)[:1]
        if first_address and not is_loopback(first_address[0]):
            return True
    return False


def split_peer(peer: str) -> tuple[str, int]:
    """Return the host and the port of an entry."""
    host, _, port = peer.rpartition(":")
    return host.strip("[]"), int(port)


class Newcomer(NamedTuple):
    """A host that has asked to follow this one.

    Attributes:
        number: Number of its entry in `strategy.peers`.
        place: Its outer steps and a checksum of their result; [-1, 0] if they are about to change.
    """

    number: int
    place: list[int]
    link: Link


class Peers:
    """The other hosts, as one host sees them: its leader, or the members that follow it.

    Attributes:
        lock: Held while weights are changed or read.
        place: Returns this host's outer steps and a checksum of their result. Called with the lock.
        reply: Returns a follower's answer to a message of its leader; None for no answer.
    """

    def __init__(
        self,
        peers: list[str],
        secret: str,
        settings: dict[str, Any],
        place: Callable[[], tuple[int, int]],
        reply: Callable[[Message], Message | None],
    ) -> None:
        """Find this host's entry in `peers`, and listen there.

        `settings` must be equal on all hosts, except for `seed`, which must differ.
        """
        self.peers = peers
        self.secret = secret.encode()
        self.settings = settings
        self.place = place
        self.reply = reply
        self.lock = threading.RLock()
        self._searching = threading.Lock()
        self.leader: Link | None = None
        self.members: dict[int, Link] = {}
        # Seeds of the hosts that follow, or are about to.
        self.seeds: dict[int, Any] = {}
        self.newcomers: queue.Queue[Newcomer] = queue.Queue()
        # Messages of the leader.
        self.inbox: queue.Queue[Message] = queue.Queue()
        # Round that is open → what followers gave, by their number.
        self.answers: dict[int, dict[int, Message]] = {}
        self.refused: str | None = None
        self.index, self.listener = listen(peers)

    def start(self) -> None:
        """Follow a leader if there is one, or else lead.

        Raises:
            ConfigError: Another host refuses this one.
        """
        threading.Thread(target=self._listen, daemon=True, name="drumline-peers").start()
        self._search_leader()
        if self.refused:
            raise ConfigError(
                self.refused,
                where=WHERE,
                fix="give all hosts one config, and each a run.seed of its own",
            )
        threading.Thread(target=self._keep_searching, daemon=True, name="drumline-peers").start()

    def _keep_searching(self) -> None:
        """Look for a leader every few seconds while there is none."""
        while True:
            time.sleep(LOOK_SECONDS)
            if self.leader is None:
                self._search_leader()

    def _search_leader(self) -> None:
        """Ask each other host whether it leads, until one does."""
        # One thread at a time: if a host found its leader twice, it would count as gone when the
        # first link closes.
        with self._searching:
            for number in range(len(self.peers)):
                if self.leader is not None or number == self.index or number in self.members:
                    continue
                try:
                    self._ask_to_lead(number)
                except WrongSecret as error:
                    self._note_refusal(f"{self.peers[number]}: {error}")
                except OSError:
                    # It is not there now.
                    continue

    def _note_refusal(self, reason: str) -> None:
        """Log once why another host refuses this one, which is asked again."""
        if reason != self.refused:
            log.warning("diloco: %s", reason)
        self.refused = reason

    def _ask_to_lead(self, number: int) -> None:
        """Follow another host if it leads and accepts this one. Raises OSError if it is away."""
        connected = socket.create_connection(split_peer(self.peers[number]), CONNECT_SECONDS)
        link = Link(greet(connected, self.secret, calls=True))
        with self.lock:
            place = [-1, 0]
            if self.inbox.empty():
                place = list(self.place())
        greeting = {
            "settings": self.settings,
            "index": self.index,
            "place": place,
        }
        link.send(greeting)

        answer = link.receive()
        if answer is None or not answer.header.get("welcome"):
            if answer is not None and "refused" in answer.header:
                self._note_refusal(str(answer.header["refused"]))
            link.close()
            return

        link.remove_limit()
        with self.lock:
            self.leader = link
            self._dismiss_followers()
        log.warning("diloco: %s follows %s", self.peers[self.index], self.peers[number])
        threading.Thread(
            target=self._follow, args=(link, number), daemon=True, name="drumline-peer"
        ).start()

    def _dismiss_followers(self) -> None:
        """Close the links of all that follow this host, or are about to."""
        links = list(self.members.values())
        # Those that are about to follow.
        for _ in range(self.newcomers.qsize()):
            links.append(self.newcomers.get_nowait().link)
        for link in links:
            link.close()
        self.members = {}
        self.answers = {}
        self.seeds = {}

    def _follow(self, link: Link, number: int) -> None:
        """Take the leader's messages until it has gone; then look for another one."""
        while True:
            message = link.receive()
            if message is None:
                break
            if message.header["kind"] != "ask":
                self.inbox.put(message)
                continue
            answer = self.reply(message)
            if answer is not None:
                link.send(answer.header, answer.payload)

        link.close()
        with self.lock:
            if self.leader is not link:
                return
            self.leader = None
        log.warning(
            "diloco: %s has gone; %s goes on without it", self.peers[number], self.peers[self.index]
        )
        self._search_leader()

    def leave(self) -> None:
        """Leave the leader. This host finds it again, and then gets its state."""
        if self.leader is not None:
            self.leader.close()

    def _listen(self) -> None:
        """Greet and answer all callers, in threads of their own."""
        serve_callers(self.listener, self._greet_caller, self._answer)

    def _greet_caller(self, connected: socket.socket) -> Link:
        """Return the link to a host that has called. Raises as `greet`."""
        return Link(greet(connected, self.secret, calls=False))

    def _answer(self, link: Link) -> None:
        """Answer a host that looks for a leader: welcome, refused, or this host does not lead."""
        greeting = link.receive()
        if greeting is None:
            link.close()
            return
        number = greeting.header["index"]
        settings = greeting.header["settings"]
        place = greeting.header["place"]
        with self.lock:
            # The host with more outer steps leads; with equal steps, the earlier entry in the list.
            own_rounds, _ = self.place()
            own_rank = (own_rounds, -self.index)
            their_rank = (place[0], -number)
            leads = self.leader is None and own_rank > their_rank
            reason = self._reason_to_refuse(settings, number)
            if leads and not reason:
                link.remove_limit()
                link.send({"welcome": True})
                self.seeds[number] = settings.get("seed")
                self.newcomers.put(Newcomer(number, place, link))
                return

        if reason:
            link.send({"refused": reason})
        else:
            link.send({"welcome": False})

        # Until the other side has closed the connection.
        link.receive()
        link.close()

    def _reason_to_refuse(self, settings: dict[str, Any], number: int) -> str | None:
        """Return why the host `number` with these settings cannot follow; None if it can."""
        their_seed = settings.get("seed")
        seeds = {**self.seeds, self.index: self.settings.get("seed")}
        for other, seed in seeds.items():
            if other != number and seed is not None and seed == their_seed:
                return f"{self.peers[other]} has run.seed={seed}, too: both would train on the same samples"

        own_name = self.peers[self.index]
        for key, value in self.settings.items():
            theirs = settings.get(key)
            if key != "seed" and theirs != value:
                return f"{key} is {value} on {own_name}, and {theirs} here"
        return None

    def admit(self, state: Callable[[], torch.Tensor], rounds: int) -> None:
        """Let the hosts follow that have come since the last call. The caller holds the lock.

        Each gets the outer state, `state()` after `rounds` outer steps, unless it has the same.
        """
        while not self.newcomers.empty():
            newcomer = self.newcomers.get_nowait()
            number = newcomer.number
            header = {
                "kind": "state",
                "round": rounds,
                "place": newcomer.place,
            }
            if newcomer.place == list(self.place()):
                header["kind"] = "same"
                newcomer.link.send(header)
            else:
                newcomer.link.send(header, state())

            if number in self.members:
                self.members[number].close()
            self.members[number] = newcomer.link
            log.warning("diloco: %s has come", self.peers[number])
            threading.Thread(
                target=self._listen_to_follower,
                args=(newcomer.link, number),
                daemon=True,
                name="drumline-peer",
            ).start()

    def _listen_to_follower(self, link: Link, number: int) -> None:
        """Take the outer gradients that a follower sends, until it has gone."""
        while True:
            message = link.receive()
            if message is None:
                break
            round_number = message.header["round"]
            with self.lock:
                # Otherwise it came too late.
                if round_number in self.answers:
                    self.answers[round_number][number] = message

        link.close()
        with self.lock:
            if self.members.get(number) is link:
                del self.members[number]
                self.seeds.pop(number, None)
                log.warning("diloco: %s has gone", self.peers[number])

    def send_to_all(self, header: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        """Send a message to all hosts that follow this one."""
        for link in list(self.members.values()):
            link.send(header, payload)
