"""Where samples come from: stores, files of other trainers, and data sources of Grain."""
