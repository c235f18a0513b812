"""The command line of ckptmap: one file a command; everything that is printed is printed here."""
