"""The engine: sequences, a scheduler, and a cycle that runs whole on the device."""
