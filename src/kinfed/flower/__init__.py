"""Real federations: any method, unchanged, on separate machines joined by Flower's SuperLink and SuperNodes.

`site` is a client at its own place, `fleet` all of them as the round loop sees them, `server` the run. Only `client`,
`server` and `grid` import flwr; the rest is plain Python that any other transport could carry.
"""
