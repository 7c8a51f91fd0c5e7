"""The fast start on a CPU: `door.py` is the entry; nothing here is active outside of it, or on another device."""
