"""Hot arithmetic: optimizers and ops, each with a plain-torch reference."""
