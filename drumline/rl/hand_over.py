"""Hand the policy's weights to the servers that sample: what all ways of doing so share."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any, Generic, TypeVar

from drumline.dist.reduce import gather_from_ranks
from drumline.errors import DrumlineError
from drumline.rl.generate import WHERE, Weights, rank_and_world_size
from drumline.rl.servers import HEALTH_SECONDS, ServedGenerator, Server, ServerError
from drumline.system.heartbeat import alive

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


# Has servers load weights. Returns an error that must end the run; None if it can go on.
Load = Callable[[], DrumlineError | None]


class Loading:
    """Weights that servers load in the background while the ranks do other things.

    Rank 0 asks the servers, in a thread. All ranks learn of its outcome in `finish`.
    """

    def __init__(
        self, load: Load, end: Callable[[DrumlineError | None], None], seconds: float
    ) -> None:
        """Have the servers begin to load.

        Args:
            load: Has the servers load, on rank 0; on other ranks it returns at once.
            end: Called on all ranks with what `load` returned. It tells all ranks what rank 0 knows of the
                servers. Collective.
            seconds: The most seconds of one of the requests that `load` sends.
        """
        self._end = end
        self._seconds = seconds
        self._is_ended = False
        self._outcome: Future[DrumlineError | None] = Future()
        # A daemon: a run that fails does not wait for servers.
        thread = Thread(target=self._run, args=(load,), daemon=True, name="drumline-hand-over")
        thread.start()

    def _run(self, load: Load) -> None:
        """Have the servers load; `finish` raises an unexpected error again."""
        try:
            self._outcome.set_result(load())
        except BaseException as error:  # noqa: BLE001 - raised where the outcome is asked for
            self._outcome.set_exception(error)

    @property
    def is_finished(self) -> bool:
        """Whether this rank need not wait for servers any longer. Other ranks than 0 never do."""
        return self._outcome.done()

    def wait(self) -> None:
        """Wait until the servers have loaded or failed, without telling other ranks."""
        self._outcome.exception()

    def finish(self) -> None:
        """Wait until the servers have the weights, and tell all ranks. Collective.

        Raises on all ranks if no server takes them, as `HandOver.refresh` does. A second call returns at once.
        """
        if self._is_ended:
            return
        self._is_ended = True
        # As `Server.request` does: what this rank has done meanwhile has taken back what that granted.
        alive(2 * self._seconds)
        self._end(self._outcome.result())


class HandOver(ABC, Generic[Kept]):
    """The base of what hands weights to servers: rank 0 keeps them, and asks each server to load them.

    They are all weights of the model, or those of its adapter. They are copied before a hand-over
    begins, or in the network's case while it does; the servers load the copy in the background. Between
    the beginning of a hand-over and its end no request may be sent.

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
        # The weights before the present ones while servers load those; else None.
        self.replaced: Kept | None = None

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
        self.begin(weights).finish()

    def begin(self, weights: Weights) -> Loading:
        """Copy the weights, and have the servers begin to load them. Collective.

        It returns once the weights are copied. `Loading.finish` raises what `refresh` does.
        """
        kept, failure = self._keep(weights)
        return self._begin(kept, failure)

    def hold(self, weights: Weights) -> Callable[[], Loading]:
        """Keep the weights, and return the function that begins to hand them over. Both are collective.

        The function may be called later, also after other weights were handed over.
        """
        kept, failure = self._keep(weights)
        self.held.append(kept)
        return partial(self._begin_held, kept, failure)

    def _begin_held(self, weights: Kept, failure: DrumlineError | None) -> Loading:
        """Have the servers begin to load weights that were held until now. Collective."""
        self.held.remove(weights)
        return self._begin(weights, failure)

    def _begin(self, weights: Kept, failure: DrumlineError | None) -> Loading:
        """Have the servers begin to load weights. Collective.

        Args:
            weights: The weights, on rank 0.
            failure: Why they could not be kept, on rank 0.
        """
        self._share_lost_servers()
        self.replaced = self.present
        self.present = weights
        self.version = f"{self.generator.version_prefix}-{self.hand_overs}"
        seconds = self.generator.config.timeout_seconds
        return Loading(partial(self._load_on_all, failure), self._end, seconds)

    def _load_on_all(self, failure: DrumlineError | None) -> DrumlineError | None:
        """Have all servers load the weights, on rank 0. Returns an error that must end the run, or None.

        `failure`: why the weights could not be kept. Then no server is asked, and it is returned.
        """
        if failure is not None or rank_and_world_size()[0] != 0:
            return failure
        return self._load_on_servers(self.pool.servers)

    def _end(self, failure: DrumlineError | None) -> None:
        """End a hand-over: tell all ranks which servers have the weights. Collective.

        `failure`: the error of rank 0 that must end the run, which is raised on all ranks.
        """
        replaced = self.replaced
        self.replaced = None
        if rank_and_world_size()[0] == 0 and failure is None and replaced is not None:
            self._release(replaced)
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
