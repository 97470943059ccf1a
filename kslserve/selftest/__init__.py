"""What `kslserve selftest` does: is this backend right on this machine, and how fast is it?"""
