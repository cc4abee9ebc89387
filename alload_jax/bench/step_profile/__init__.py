"""Where the device time of a training step goes, by named part, with the roof beside each."""
