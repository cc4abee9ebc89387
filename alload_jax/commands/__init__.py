"""The subcommands of `alload`: each a file with HELP, add_arguments and run."""
