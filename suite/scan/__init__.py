"""The ownership scan: who translates ids, probes allocators or imports what only others may.

`rules.py` reads the rules, `names.py` says what an expression may stand for, `checks.py` holds one
file against the rules, `sources.py` walks a tree. Nothing is executed or imported, and no torch.
"""
