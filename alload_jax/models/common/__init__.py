"""Code shared by model families: attention, segments, rotary embedding, weight files."""
