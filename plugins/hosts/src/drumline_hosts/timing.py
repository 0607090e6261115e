"""All time limits of the protocol between hosts, each with its reason.

docs/explanations/elastic_hosts.md has them in one table, and the rules by number. Each process
measures a limit by its own monotonic clock, because the clocks of hosts differ and jump. The limits
of the lease of a run folder are the base's: `drumline.launch.lease`.
"""

# ---- The link between the launcher and an agent

# Between two beats of an agent. It kills its ranks if more than three in a row are late.
BEAT_SECONDS = 1.0
# An agent kills its ranks if it sent the newest beat that the launcher has heard so long ago (A2).
AGENT_SECONDS = 4.5
# The launcher gives a host up after this silence (L2). It is longer than AGENT_SECONDS, so that the
# host's ranks are dead by then: 1.5 s are for the agent's look and the kill.
SILENT_SECONDS = 6.0
# Replaces both before the first ranks start: a launcher that plans and imports torch may have no
# core to answer with.
IDLE_SECONDS = 60.0
# Between two looks of an agent at the age of that beat. Short compared with the 1.5 s.
AGENT_LOOK_SECONDS = 0.2
# How long a connection may take. Linux repeats a lost packet after 1, 3 and 7 s.
CONNECT_SECONDS = 10.0
# How long one answer of the handshake may take. A stranger who says nothing is dropped then.
HANDSHAKE_SECONDS = 10.0

# ---- The launcher

# How long an agent may take to import torch and connect. A cold network disk takes minutes.
START_SECONDS = 180.0
# Between two starts of an agent that ends before it connects.
AGAIN_SECONDS = 2.0
# How long a lost host may take to come back before the next attempt, and too few hosts to become
# enough. A host that was asked to end is left alone for as long, since it may be shutting down.
BACK_SECONDS = 60.0
# How long an answer may take: a host may have to read the files of a model from a slow disk.
REPLY_SECONDS = 600.0
# How long after the grace time of its ranks a host may report their end: it kills ranks and reads
# logs meanwhile.
END_SECONDS = 30.0
# How long an agent that was sent away may take to end, before its process is killed.
LEAVE_SECONDS = 5.0
# Between two looks of the launcher at its hosts. Short compared with SILENT_SECONDS.
LOOK_SECONDS = 0.1

# ---- Hosts that come and go

# Between two starts of agents on the hosts that have none. Each costs both sides an ssh handshake.
RECALL_SECONDS = 5.0
# Between two looks at the events of a run for a checkpoint at which a host may join.
EVENTS_SECONDS = 1.0
# How long a network file system may take to show the file of another host.
SHARED_SECONDS = 10.0

# ---- Another launcher

# After the loss of its launcher a host does not vote for this long (V1). By then a launcher that
# still runs has given the host up, and has had 2 s to end its own ranks.
FREE_SECONDS = SILENT_SECONDS + 2.0
# From a vote until its winner's launcher listens: it imports torch. No other vote is given
# meanwhile (V3).
OFFICE_SECONDS = 20.0
# How long the connection to another host's voter may take, and each of its messages. A voter
# answers from memory, so a host that takes longer is cut off.
ASK_SECONDS = 2.0
# Between the first trials of two hosts (T3). A trial is over by then, so that one usually wins.
TURN_SECONDS = 2.0
# How long an agent looks for another launcher. There is room for two elections whose winners are
# lost: FREE_SECONDS + 2 × OFFICE_SECONDS. With a shared folder twice as long, because a launcher
# without hosts keeps the lease for BACK_SECONDS.
FIND_SECONDS = 60.0
# Between two looks of an agent for another launcher, and at the lease.
FIND_LOOK_SECONDS = 1.0
# After so many looks in a row that find the lease of another launcher, the run counts as ended and
# no agent follows (T5). A few looks may find no lease while another host takes it.
ENDED_LOOKS = 5
# How long a launcher that follows waits for the other agents to find it, before it starts agents.
AGENTS_SECONDS = 20.0

# ---- Ray

# How long an actor that runs may take to answer. A lost node is noticed by the link to its agent.
ANSWER_SECONDS = 5.0
# How long the placement group may take, and the imports of an actor.
PLACE_SECONDS = 120.0
