"""What runs the operations fast, a room for each kind of machine; neither layers nor autograd."""
