"""Leasing policy: which node gets how many rollouts of which problems, and when. Data flows from top to bottom:

- `measured`: completion lengths and the learner's step times, from events. `nodes/` measures each node's speed and
  counts how many rollouts it may hold.
- `sizing`: the policy, pure functions of these figures. `room`: groups to open. `terms_of_step`: deadline, oldest
  version and lease size of a step's work. `lease_size`: rollouts for one node. `lateness_s`: when a
  lease is late.
- `leasing`: applies the policy to the open groups and ready nodes, and makes the leases.
- `outstanding`: leases that nodes hold, until their rollouts arrive, are late or overdue.

`admitting` opens groups, `curriculum` and `mixture` choose their problems, `usability` withdraws unusable versions.
Constants marked "set by hand" are here and in `nodes/`; `python -m benchmarks simulate` measures what they do.
"""
