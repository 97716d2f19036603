"""The commands of `echo-node`, by what they are about."""
