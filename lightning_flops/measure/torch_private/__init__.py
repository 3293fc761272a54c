"""All private names of torch that we use. Each is looked up here, has a stand-in, and says what is lost without it.

``names`` has the classes that do this. The other files hold the names, by subject.
"""
