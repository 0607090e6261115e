"""Connections between hosts that train by themselves, and who of them leads: any may go or come, and none waits for another.

Each host listens at its entry of `strategy.peers`, and leads until it follows: it looks for another leader every few seconds, which takes
it where that one has done more outer steps (of as many, where it stands before it in the list). Two groups that a broken network left with
a leader each so become one again. A follower whose leader has gone leads itself, and the others find it, or it them.

Both sides prove that they know a secret (HMAC, `multiprocessing.connection`). What is sent is not encrypted: a header in JSON, and bytes.
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

from drumline.core.network import addresses, is_here, is_loopback
from drumline.core.sockets import each_caller, wait_at_most
from drumline.errors import ConfigError

log = logging.getLogger(__name__)
LOOK_SECONDS = 3.0  # between two looks for a leader
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30  # for an answer to a greeting: the other may be inside of an optimizer step
READS = (socket.SO_RCVTIMEO,)  # how long a write may take is for SILENT_SECONDS
SILENT_SECONDS = 10  # since a host that is sent to has answered, or its kernel: then it is gone
MOST_WAITING = 200  # messages to one host; one that takes none is given up
LONGEST = 2**36  # bytes of a message
WHERE = "strategy.peers"


class Message(NamedTuple):
    header: dict[str, Any]
    payload: torch.Tensor | None  # uint8[N]


class Link:
    """A connection that is there: one thread receives, and one of its own sends what any thread hands it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: queue.Queue[Message | None] = queue.Queue()
        threading.Thread(target=self._write, daemon=True, name="drumline-peer").start()

    def send(self, header: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        """Without waiting. Nothing where the other side has gone: who receives learns that."""
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(Message(header, payload))
        else:
            self.close()

    def receive(self) -> Message | None:
        """The next message; None where the other side has gone, or speaks otherwise."""
        try:
            header = json.loads(self._connection.recv_bytes(2**20))
            bytes_ = self._connection.recv_bytes(LONGEST) if header["bytes"] else None
        except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return Message(
            header,
            None if bytes_ is None else torch.frombuffer(bytearray(bytes_), dtype=torch.uint8),
        )

    def no_limit(self) -> None:
        """From now on the next message may take as long as it takes."""
        with socket.socket(fileno=self._connection.fileno()) as ends:
            wait_at_most(ends, 0, READS)
            ends.detach()

    def close(self) -> None:
        """Also while another thread receives: it gets None."""
        self._waiting.put(None)
        with suppress(OSError), socket.socket(fileno=self._connection.fileno()) as ends:
            with suppress(OSError):
                ends.shutdown(socket.SHUT_RDWR)
            ends.detach()

    def _write(self) -> None:
        while (message := self._waiting.get()) is not None:
            header, payload = message
            try:
                self._connection.send_bytes(
                    json.dumps(
                        {**header, "bytes": 0 if payload is None else payload.numel()}
                    ).encode()
                )
                if payload is not None:
                    self._connection.send_bytes(payload.cpu().numpy().data)
            except OSError:
                return


class WrongSecret(ConnectionError):
    """The other is one of ours, and has another secret."""


def greet(connected: socket.socket, secret: bytes, calls: bool) -> Connection:
    """An authenticated connection. Raises OSError where the other is not one of ours, or does not answer."""
    for option, value in (("SO_KEEPALIVE", 1), ("TCP_NODELAY", 1), ("TCP_KEEPIDLE", SILENT_SECONDS // 2), ("TCP_KEEPINTVL", 2),
                          ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 1000 * SILENT_SECONDS)):  # fmt: skip
        if hasattr(socket, option):  # some are Linux's
            connected.setsockopt(
                socket.SOL_SOCKET if option[:2] == "SO" else socket.IPPROTO_TCP,
                getattr(socket, option),
                value,
            )
    connected.settimeout(None)
    wait_at_most(connected, ANSWER_SECONDS, READS)
    connection = Connection(connected.detach())
    try:
        for challenge in (
            (answer_challenge, deliver_challenge)
            if calls
            else (deliver_challenge, answer_challenge)
        ):
            challenge(connection, secret)
    except (AuthenticationError, EOFError, AssertionError, OSError) as error:
        connection.close()
        if isinstance(error, AuthenticationError):
            raise WrongSecret("it has another strategy.secret") from error
        raise ConnectionError("who is there is none of ours") from error
    return connection


def listen(peers: list[str]) -> tuple[int, socket.socket]:
    """The number of this host's entry, the first that is its own and free, and what listens there. Raises ConfigError, also where the
    names of this host mean loopback here, as Debian's /etc/hosts has them, and those of others do not."""
    taken = False
    away = any(
        not is_loopback(address) for host, _ in map(split, peers) for address in addresses(host)[:1]
    )
    for number, (host, port) in enumerate(map(split, peers)):
        for address in filter(is_here, addresses(host)):
            if away and is_loopback(address):
                fix = "name an IP address, or give the host its address in /etc/hosts"
                raise ConfigError(
                    f"{host} is {address} here, which no other host reaches", where=WHERE, fix=fix
                )
            try:
                return number, socket.create_server(
                    (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET
                )
            except OSError:
                taken = True
    what = (
        "the ports of this host are taken" if taken else "none of them is an address of this host"
    )
    raise ConfigError(
        f"{what}: {', '.join(peers)}",
        where=WHERE,
        fix="name each host once, with a free port: [a:29600, b:29600]",
    )


def split(peer: str) -> tuple[str, int]:
    host, _, port = peer.rpartition(":")
    return host.strip("[]"), int(port)


class Peers:
    """`lock`: whoever changes or reads what is exchanged has it. `place()`: this host's outer steps and a checksum of what they came to,
    called with the lock. `reply(message)`: what a follower answers its leader, None where it has nothing."""

    def __init__(
        self,
        peers: list[str],
        secret: str,
        settings: dict[str, Any],
        place: Callable[[], tuple[int, int]],
        reply: Callable[[Message], Message | None],
    ) -> None:
        """`settings`: what must be the same on all hosts; and `seed`, which must not."""
        self.peers, self.secret, self.settings, self.place, self.reply = (
            peers,
            secret.encode(),
            settings,
            place,
            reply,
        )
        self.lock, self._looking = threading.RLock(), threading.Lock()
        self.leader: Link | None = None
        self.members: dict[int, Link] = {}
        self.seeds: dict[int, Any] = {}  # of those that follow, or are about to
        self.newcomers: queue.Queue[tuple[int, list[int], Link]] = queue.Queue()  # number, place
        self.inbox: queue.Queue[Message] = queue.Queue()  # of the leader
        self.gives: dict[
            int, dict[int, Message]
        ] = {}  # round that is open → what followers came with, by number
        self.refused: str | None = None
        self.index, self.listener = listen(peers)

    def start(self) -> None:
        """Follow a leader that is there, or lead. Raises ConfigError where one refuses this host."""
        threading.Thread(target=self._listen, daemon=True, name="drumline-peers").start()
        self._look()
        if self.refused:
            raise ConfigError(
                self.refused,
                where=WHERE,
                fix="give all hosts one config, and each a run.seed of its own",
            )
        threading.Thread(target=self._look_again, daemon=True, name="drumline-peers").start()

    # ------------------------------------------------------------------------------------------------------ to find a leader

    def _look_again(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            if self.leader is None:
                self._look()

    def _look(self) -> None:
        with self._looking:  # who finds one twice is taken for gone when the first link closes
            for number in range(len(self.peers)):
                if self.leader is None and number != self.index and number not in self.members:
                    try:
                        self._ask_to_lead(number)
                    except WrongSecret as error:
                        self._refuse(f"{self.peers[number]}: {error}")
                    except OSError:
                        continue  # not there now

    def _refuse(self, why: str) -> None:
        """Another host does not take this one; it is asked again, and said once."""
        if why != self.refused:
            log.warning("diloco: %s", why)
        self.refused = why

    def _ask_to_lead(self, number: int) -> None:
        link = Link(
            greet(
                socket.create_connection(split(self.peers[number]), CONNECT_SECONDS),
                self.secret,
                calls=True,
            )
        )
        with self.lock:
            place = [-1, 0] if not self.inbox.empty() else list(self.place())
        link.send({"settings": self.settings, "index": self.index, "place": place})
        answer = link.receive()
        if answer is None or not answer.header.get("welcome"):
            if answer is not None and "refused" in answer.header:
                self._refuse(str(answer.header["refused"]))
            return link.close()
        link.no_limit()
        with self.lock:
            self.leader = link
            for gone in [
                *self.members.values(),
                *(self.newcomers.get_nowait()[2] for _ in range(self.newcomers.qsize())),
            ]:
                gone.close()
            self.members, self.gives, self.seeds = {}, {}, {}
        log.warning("diloco: %s follows %s", self.peers[self.index], self.peers[number])
        threading.Thread(
            target=self._follow, args=(link, number), daemon=True, name="drumline-peer"
        ).start()

    def _follow(self, link: Link, number: int) -> None:
        while (message := link.receive()) is not None:
            if message.header["kind"] != "ask":
                self.inbox.put(message)
            elif (answer := self.reply(message)) is not None:
                link.send(*answer)
        link.close()
        with self.lock:
            if self.leader is not link:
                return
            self.leader = None
        log.warning(
            "diloco: %s has gone; %s goes on without it", self.peers[number], self.peers[self.index]
        )
        self._look()

    def leave(self) -> None:
        """Away from the leader, and back, to get its state."""
        if self.leader is not None:
            self.leader.close()

    # ------------------------------------------------------------------------------------------------------------- to lead

    def _listen(self) -> None:
        each_caller(
            self.listener,
            lambda connected: Link(greet(connected, self.secret, calls=False)),
            self._answer,
        )

    def _answer(self, link: Link) -> None:
        greeting = link.receive()
        if greeting is None:
            return link.close()
        number, theirs, place = (greeting.header[key] for key in ("index", "settings", "place"))
        with self.lock:
            leads = self.leader is None and (self.place()[0], -self.index) > (place[0], -number)
            reason = self._differs(theirs, number)
            if leads and not reason:
                link.no_limit()
                link.send({"welcome": True})
                self.seeds[number] = theirs.get("seed")
                self.newcomers.put((number, place, link))
                return
        link.send({"refused": reason} if reason else {"welcome": False})
        link.receive()  # until it has gone
        link.close()

    def _differs(self, theirs: dict[str, Any], number: int) -> str | None:
        me = self.peers[self.index]
        for other, seed in {**self.seeds, self.index: self.settings.get("seed")}.items():
            if other != number and seed is not None and theirs.get("seed") == seed:
                return f"{self.peers[other]} has run.seed={seed}, too: both would train on the same samples"
        for key, value in self.settings.items():
            if key != "seed" and theirs.get(key) != value:
                return f"{key} is {value} on {me}, and {theirs.get(key)} here"
        return None

    def admit(self, state: Callable[[], torch.Tensor], rounds: int) -> None:
        """Take in who has come since the last call: it gets the outer state, unless it has the same. With the lock."""
        while not self.newcomers.empty():
            number, place, link = self.newcomers.get_nowait()
            same = place == list(self.place())
            link.send(
                {"kind": "same" if same else "state", "round": rounds, "place": place},
                None if same else state(),
            )
            if number in self.members:
                self.members[number].close()
            self.members[number] = link
            log.warning("diloco: %s has come", self.peers[number])
            threading.Thread(
                target=self._hear, args=(link, number), daemon=True, name="drumline-peer"
            ).start()

    def _hear(self, link: Link, number: int) -> None:
        while (message := link.receive()) is not None:
            with self.lock:
                if message.header["round"] in self.gives:  # else it came too late
                    self.gives[message.header["round"]][number] = message
        link.close()
        with self.lock:
            if self.members.get(number) is link:
                del self.members[number]
                self.seeds.pop(number, None)
                log.warning("diloco: %s has gone", self.peers[number])

    def to_all(self, header: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        for link in list(self.members.values()):
            link.send(header, payload)
