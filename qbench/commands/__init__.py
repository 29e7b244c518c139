"""One module a command: arguments in, words or JSON out. The work is done by the rooms below."""
