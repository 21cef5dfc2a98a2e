"""The fast path: the cycle of `decoding.loop`, whole on the device, at the speed of its memory."""
