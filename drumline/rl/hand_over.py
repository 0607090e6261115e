"""Hand the policy's weights to the servers that sample: what all ways of doing so share."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from drumline.dist.reduce import gather_from_ranks
from drumline.errors import DrumlineError
from drumline.rl.generate import WHERE, Weights, rank_and_world_size
from drumline.rl.servers import HEALTH_SECONDS, ServedGenerator, Server, ServerError

logger = logging.getLogger(__name__)

T = TypeVar("T")
# The weights of one version, as rank 0 keeps them.
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class AdapterFiles:
    """How an adapter is written as PEFT's files."""

    # Writes adapter_config.json into a folder.
    save_config: Callable[[str], Any]
    # Returns the name that the files give a weight.
    name_in_files: Callable[[str], str]

    def name_weights(self, weights: dict[str, T]) -> dict[str, T]:
        """Return weights under the names that they have in PEFT's file."""
        named = {}
        for name, weight in weights.items():
            named[self.name_in_files(name)] = weight
        return named


class HandOver(ABC, Generic[Kept]):
    """The base of what hands weights to servers: rank 0 keeps them, and asks each server to load them.

    They are all weights of the model, or those of its adapter.

    A lost server that answers again first gets the weights, then requests. `restore_weights` finds servers
    that restarted without any request failing, by the version of their weights, and hands the weights
    over again.
    """

    def __init__(self, generator: ServedGenerator) -> None:
        """Prepare to hand over weights; nothing is kept yet.

        `generator`: samples on the servers.
        """
        self.generator = generator
        self.pool = generator.pool
        # Number of hand-overs so far.
        self.hand_overs = 0
        # The weights that were handed over last; None before the first hand-over.
        self.present: Kept | None = None
        # The version of these weights, by which a server is recognised that does not have them.
        self.version = ""
        # Weights that are not handed over yet.
        self.held: list[Kept] = []

    @abstractmethod
    def _keep(self, weights: Weights) -> tuple[Kept, DrumlineError | None]:
        """Go through all weights, and keep them on rank 0 until `_release`. Collective.

        Returns what is kept, and on rank 0 why that failed, or None if it did not.
        """

    @abstractmethod
    def _release(self, weights: Kept) -> None:
        """Give up weights that nothing reads any more. Rank 0 alone calls it."""

    @abstractmethod
    def _give(self, server: Server, weights: Kept) -> None:
        """Have a server load weights as those of `version`. Raises ServerError if it does not."""

    def refresh(self, weights: Weights) -> None:
        """Hand over the weights. Collective; it returns once the servers have them, on all ranks.

        Raises on all ranks if the weights cannot be kept or no server takes them: the error
        itself on rank 0, DrumlineError on the others. In the first hand-over each server must take them.
        """
        kept, failure = self._keep(weights)
        self._hand_over(kept, failure)

    def hold(self, weights: Weights) -> Callable[[], None]:
        """Keep the weights, and return the function that hands them over. Both are collective.

        The function may be called later, also after other weights were handed over. It raises what
        `refresh` does.
        """
        kept, failure = self._keep(weights)
        self.held.append(kept)
        return partial(self._hand_over_held, kept, failure)

    def _hand_over_held(self, weights: Kept, failure: DrumlineError | None) -> None:
        """Have the servers load weights that were held until now. Collective."""
        self.held.remove(weights)
        self._hand_over(weights, failure)

    def _hand_over(
        self,
        weights: Kept,
        failure: DrumlineError | None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Have the servers load weights. Collective.

        Args:
            weights: The weights, on rank 0.
            failure: Why they could not be kept, on rank 0.
            meanwhile: What all ranks do while the servers load; None: they wait.
        """
        self._share_lost_servers()
        previous = self.present
        self.present = weights
        self.version = f"{self.generator.version_prefix}-{self.hand_overs}"
        is_rank_0 = rank_and_world_size()[0] == 0
        with ThreadPoolExecutor(1) as thread:
            loading: Future[DrumlineError | None] | None = None
            if is_rank_0 and failure is None:
                loading = thread.submit(self._load_on_servers, self.pool.servers)
            if meanwhile is not None:
                meanwhile()
            if loading is not None:
                failure = loading.result()
        if is_rank_0 and failure is None and previous is not None:
            self._release(previous)
        self.hand_overs += 1
        states = [server.state() for server in self.pool.servers]
        self.pool.set_states(_share_from_rank_0(states, failure))

    def restore_weights(self) -> list[str]:
        """Hand the present weights over again to servers that do not have them, and return their urls.

        Such a server was restarted since the last hand-over, or another run has given it weights. What it
        sampled since is not of the policy. A server that does not tell a version is not asked. Collective.

        Raises DrumlineError on all ranks if no server has the weights afterwards.
        """
        servers = self.pool.servers
        failure: DrumlineError | None = None
        outdated: list[int] = []
        if rank_and_world_size()[0] == 0:
            for number, server in enumerate(servers):
                if not self._has_present_weights(server):
                    outdated.append(number)
                    self._note_restart(server)
            failure = self._load_on_servers([servers[number] for number in outdated])
        states = [(number, servers[number].state()) for number in outdated]
        restarted = []
        for number, state in _share_from_rank_0(states, failure):
            self.pool.set_state_after_restart(servers[number], state)
            restarted.append(servers[number].url)
        return restarted

    def _has_present_weights(self, server: Server) -> bool:
        """Return whether a server has the weights that it was handed last, as far as that is known.

        A lost server counts as one that has them, since it gets no requests.
        """
        if server.is_lost or not server.tells_version:
            return True
        try:
            return self.generator.read_version(server) == self.version
        except ServerError:
            # It may have been restarted before it was lost. `_load` finds out what is wrong with it.
            return False

    def _note_restart(self, server: Server) -> None:
        """Log that a server was restarted, and mark it as lost so that `_load` identifies it again."""
        logger.warning(
            "%s: %s has other weights than it was handed, as after a restart: it gets them again",
            WHERE,
            server.url,
        )
        server.mark_lost()

    def _share_lost_servers(self) -> None:
        """Mark each server as lost that any rank has lost: it may have restarted. Collective."""
        servers = self.pool.servers
        for lost_by_rank in gather_from_ranks([server.is_lost for server in servers]):
            for server, is_lost in zip(servers, lost_by_rank, strict=True):
                if is_lost:
                    server.mark_lost()

    def _load_on_servers(self, servers: list[Server]) -> DrumlineError | None:
        """Have servers load the weights at the same time, and mark those that fail as lost.

        Returns an error that must end the run: no server has the weights, or one refused them. None if
        the run can go on.
        """
        if not servers:
            return None
        with ThreadPoolExecutor(len(servers)) as threads:
            errors = list(threads.map(self._load, servers))
        for server, error in zip(servers, errors, strict=True):
            if error is None:
                continue
            # The server or the config is wrong, which a restart of the server does not change.
            is_set_up_wrongly = self.hand_overs == 0 or error.is_refusal
            if is_set_up_wrongly and not server.is_lost:
                return error
            # For a server that was lost already, only the reason changes.
            if not self.pool.lose(server, error):
                return error
        return None

    def _load(self, server: Server) -> ServerError | None:
        """Have one server load the weights. A lost server loads them if it is back.

        Returns why that failed; None if it did not.
        """
        assert self.present is not None, "weights were handed over before"
        try:
            if server.is_lost:
                self.generator.identify(server, HEALTH_SECONDS)
            self._give(server, self.present)
            server.tells_version = self.generator.read_version(server) == self.version
        except ServerError as error:
            return error
        server.is_lost = False
        if not server.tells_version and self.hand_overs == 0:
            logger.warning(
                "%s: %s does not tell which weights it has (vLLM 0.32 does),"
                " so a restart between two hand-overs would not be noticed",
                WHERE,
                server.url,
            )
        return None


def _share_from_rank_0(value: T, failure: DrumlineError | None) -> T:
    """Return rank 0's value on all ranks. Collective.

    `failure`: why rank 0 has failed; None if it has not, and on other ranks. Raises it on rank 0, and
    DrumlineError on the others.
    """
    value_of_rank_0, has_failed = gather_from_ranks((value, failure is not None))[0]
    if failure is not None:
        raise failure
    if has_failed:
        raise DrumlineError(
            "rank 0 could not hand over the weights; its log has the reason", where=WHERE
        )
    return value_of_rank_0
