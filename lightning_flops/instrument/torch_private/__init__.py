"""The one room of torch's private names: each is looked up here, has a stand-in, and says what is lost without it.

What stands in ``names`` says how. The other files hold the names by subject.
"""
