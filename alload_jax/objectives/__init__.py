"""What training minimises, found by name."""
