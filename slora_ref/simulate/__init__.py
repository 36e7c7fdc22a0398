"""The simulator: the real scheduler, policies, allocator and prefetcher under a clock that a roofline moves on."""
