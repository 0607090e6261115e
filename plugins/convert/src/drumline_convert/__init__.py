"""Configs of LLaMA-Factory, Axolotl, TRL and transformers → the same in Drumline's words.

Tables have a rule for each key, and `groups` combines several keys. Nothing is dropped silently: a
key without a meaning gets a note. One whose effect Drumline lacks is an error, or on a lenient
sheet a note. The sheet, the rules and the tables of accelerate and DeepSpeed are in
`drumline.compat`.
"""
