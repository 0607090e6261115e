"""DiLoCo over slow links: in fragments, in 8 bits, during inner steps, on hosts that come and go.

`section` adds keys to Drumline's strategy diloco. `cost` and `spec` are its two other parts. The
engines are `streaming`, for the ranks of one run, and `peers` over `links`, for hosts that train by
themselves.
"""
