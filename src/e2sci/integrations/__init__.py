"""The rules and credit inside of other people's programs, by the doors that these leave open."""
