"""Real federations: any method, unchanged, on separate machines, whose messages travel by Flower's protocol.

`site` is a client at its own place, `fleet` all of them as the round loop sees them, `server` the run; `node` and `hub`
are the programs of a site and of the server. What is used of Flower is listed in `flower_names`.
"""
