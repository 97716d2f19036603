"""The Tinker API over HTTP: reads requests and writes answers. `echo_hub.tenants.service` does the work.

Recipes of tinker-cookbook and scripts with the tinker SDK reach a hub by its address alone:
`TINKER_BASE_URL=https://HUB/tinker`. Requests are JSON. Only the body of forward_backward and the results of sample and
forward_backward are protobuf messages (`training_body`, `results`).
"""
