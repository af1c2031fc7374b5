"""Named meshes, typed collectives and a ledger of what they cost."""
