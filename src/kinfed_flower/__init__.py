"""Real federations: any method, unchanged, on separate machines, whose messages travel by Flower's protocol.

All agree to a `plan`. `wire` has the messages and how they travel, `masking` the sums that the server cannot look into.
`site` is a client at its own place, `server` the run, and neither imports the other. `programs` are what each side
starts. What is used of Flower is listed in `wire/flower_names.py`.
"""
