"""From images and videos with captions to a data folder."""
