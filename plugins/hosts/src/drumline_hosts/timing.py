"""All time limits of the protocol between hosts, each with its reason.

docs/explanations/elastic_hosts.md has them in one table, and the rules by number. Each process
measures a limit by its own monotonic clock, because the clocks of hosts differ and jump. The limits
of the lease of a run folder are the base's: `drumline.launch.lease`.
"""

# ---- The link between the launcher and an agent

# Between two beats of an agent. Three may be late before it kills its ranks.
BEAT_SECONDS = 1.0
# An agent kills its ranks if it sent the newest beat that the launcher has heard so long ago (A2).
AGENT_SECONDS = 4.5
# The launcher gives a host up after this silence (L2). It is longer than AGENT_SECONDS, so that the
# host's ranks are dead by then: 1.5 s are for the agent's look and the kill.
SILENT_SECONDS = 6.0
# In the place of both before the first ranks: a launcher that plans, and imports torch, may have no
# core to answer.
IDLE_SECONDS = 60.0
# Between two looks of an agent at the age of that beat. Small against the 1.5 s.
AGENT_LOOK_SECONDS = 0.2
# For a connection to be made. Linux repeats a lost packet after 1, 3 and 7 s.
CONNECT_SECONDS = 10.0
# For one answer of the handshake. A stranger who says nothing is dropped then.
HANDSHAKE_SECONDS = 10.0

# ---- The launcher

# For an agent to import torch and to connect. Generous: a cold network disk takes minutes.
START_SECONDS = 180.0
# Between two starts of an agent that ends before it connects.
AGAIN_SECONDS = 2.0
# For a lost host to come back before the next attempt, and for too few hosts to become enough. Also
# how long a host is left alone that was asked to end: it may be going down.
BACK_SECONDS = 60.0
# For an answer, for which a host may have to read the files of a model from a slow disk.
REPLY_SECONDS = 600.0
# For a host to report the end of its ranks, after their own grace time: the kill, and reading logs.
END_SECONDS = 30.0
# For an agent to end after it was sent away. Its process is killed then.
LEAVE_SECONDS = 5.0
# Between two looks of the launcher at its hosts. Small against SILENT_SECONDS.
LOOK_SECONDS = 0.1

# ---- Hosts that come and go

# Between two starts of agents on the hosts that have none. Each costs both sides an ssh handshake.
RECALL_SECONDS = 5.0
# Between two looks at the events of a run for a checkpoint at which a host may join.
EVENTS_SECONDS = 1.0
# For a network file system to show the file of another host.
SHARED_SECONDS = 10.0

# ---- Another launcher

# After the loss of its launcher a host does not vote for this long (V1). By then a launcher that
# still runs has given the host up, and has had 2 s to end its own ranks.
FREE_SECONDS = SILENT_SECONDS + 2.0
# From a vote until its winner's launcher listens: it imports torch. No other vote is given
# meanwhile (V3).
OFFICE_SECONDS = 20.0
# For the connection to another host's voter, and for each of its messages. A voter answers from
# memory, so a host that takes longer is cut off.
ASK_SECONDS = 2.0
# Between the first trials of two hosts (T3). A trial is over by then, so that one usually wins.
TURN_SECONDS = 2.0
# For an agent to find another launcher. There is room for two elections whose winners are lost:
# FREE_SECONDS + 2 × OFFICE_SECONDS. With a shared folder twice as long, because a launcher without
# hosts keeps the lease for BACK_SECONDS.
FIND_SECONDS = 60.0
# Between two looks of an agent for another launcher, and at the lease.
FIND_LOOK_SECONDS = 1.0
# After so many looks in a row at a lease that is another's, nobody follows (T5). Some looks find no
# lease while another host takes it.
ENDED_LOOKS = 5
# For the other agents to find the launcher that follows, before it starts agents by itself.
AGENTS_SECONDS = 20.0

# ---- Ray

# For an answer of an actor that runs. A lost node is noticed by the link to its agent.
ANSWER_SECONDS = 5.0
# For the placement group, and for what an actor imports.
PLACE_SECONDS = 120.0
