"""Models of images: a residual network, classifiers of transformers, and a network that predicts noise."""
