"""Planted faults: known defects that the comparison must catch. Names here, planting beside the engine."""

FAULTS: dict[str, str] = {
    "read_skips_translation": "attention reads through virtual ids, as if the page map were the identity",
}
