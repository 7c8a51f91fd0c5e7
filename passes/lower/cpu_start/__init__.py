"""The fast start on a CPU: `door.py` is the way in; nothing here is in force outside of it, or on another device."""
