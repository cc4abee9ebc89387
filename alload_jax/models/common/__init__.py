"""What model families share: attention, segments, rotary embedding, weights in and out."""
