"""The transformer of HunyuanVideo 1.5, an MMDiT."""
