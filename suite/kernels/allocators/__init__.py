"""Who owns which page. `paged.py` serves the static pool, `window.py` the unified one.

Both work in virtual pages, take all or nothing, and keep the host's copy of every map as the
authority: planning a move never waits for the device.
"""
