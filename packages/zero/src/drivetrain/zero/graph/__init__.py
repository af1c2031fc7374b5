"""A compiled training graph with ZeRO's communication placed in it: passes over plain lists, and their torch side.

Pure, and tested without processes: `reads` (which node reads which parameters), `schedule` (when each bucket is sent
for, waited for and let go), `prefetch` (starts moved ahead, within a memory budget), `keep` (what stays whole for the
rest of the step), `planner` (these in one). On torch's side: `rewrite` (a schedule becomes nodes of an FX graph),
`pieces` (what lies between them goes to a compiler), `profile` (what each node takes), `program` (a graph that runs and
is measured), and `internals`, the only module that touches private parts of torch.

The ideas are those of DeepCompile (Tanaka et al., arXiv:2504.09983): profile, then prefetch as far ahead as memory
allows, and keep what is worth most.
"""
