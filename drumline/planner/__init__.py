"""Predict how a run fits on a cluster, and search for the best layout. Nothing is launched.

A config becomes a `Question` (`question`): config, cluster, sizes of the models, lengths of the data.
`search` tries all strategies × micro-batches × modes of activation checkpointing that the rules of
`drumline.plan` allow, and ranks them in an `Answer`. `cost` estimates memory, traffic and seconds of
each by formulas; `strategies` holds what differs between strategies; `trace` measures activations.
`report` prints answers and explains them.

Callers: `drumline plan` (`command`), `drumline init` (`init`), `drumline.plan` (`public`), `drumline
strategies` (`matrix`). `train.setup` chooses for `strategy: auto` (`search.auto`), and `train.replan`
finds another plan after a run ran out of memory (`search.advice.find_fallbacks`).
"""
