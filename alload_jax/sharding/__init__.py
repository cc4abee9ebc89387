"""Where arrays live: the mesh and the partition rules."""
