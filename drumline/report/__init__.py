"""Everything that a user sees of a run, made from events.jsonl, plan.json and manifests alone.

- `start_banner`, `progress`, `waiting`, `bars`: the terminal.
- `page`: the HTML report, from `facts` (what a run folder holds), `sections`, `details`, `curves`,
  `markup` and the templates; `picture` draws its curves as a PNG.
- `watch`: the live page of `drumline watch`.
- `compare`: two sides of runs, with a significance test.
"""
