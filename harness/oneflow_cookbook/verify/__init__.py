"""`launch.sh verify`: does a script compute the same on n ranks as on one rank, and if not, where does it begin?"""
