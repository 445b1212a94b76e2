import pytest
import torch

from protocol.errors import DataError
from trainer.classifier import Classifier, load_classifier, save_classifier
from trainer.model import ClipEncoder, EncoderConfig, save_encoder

CONFIG = EncoderConfig(length=16, patch=4, width=8, depth=1, heads=2)


@pytest.fixture
def classifier():
    torch.manual_seed(0)
    model = Classifier(ClipEncoder(CONFIG), ("A/1", "A/2", "B/ü"))
    torch.nn.init.normal_(model.head.weight)
    return model


def test_a_classifier_comes_back_as_it_was_saved(tmp_path, classifier):
    save_classifier(tmp_path / "c.safetensors", classifier, {"run_id": "finetune.0001.0000.full"})
    loaded, meta = load_classifier(tmp_path / "c.safetensors")
    clips = torch.randn(5, 16)
    assert torch.equal(loaded(clips), classifier(clips))
    assert loaded.classes == ("A/1", "A/2", "B/ü")
    assert meta == {"run_id": "finetune.0001.0000.full"}


def test_the_same_classifier_makes_the_same_bytes_every_time(tmp_path, classifier):
    path, made = tmp_path / "c.safetensors", set()
    for _ in range(16):
        save_classifier(path, classifier, {"run_id": "finetune.0001.0000.full", "pool": "f4"})
        made.add(path.read_bytes())
    assert len(made) == 1


def test_at_first_every_class_is_as_likely():
    model = Classifier(ClipEncoder(CONFIG), ("a", "b"))
    assert not model(torch.randn(3, 16)).any()


def test_what_is_no_classifier_is_refused_by_name(tmp_path, classifier):
    path = tmp_path / "c.safetensors"
    with pytest.raises(DataError, match=r"c\.safetensors"):
        load_classifier(path)
    save_classifier(path, classifier, {})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"c\.safetensors"):
        load_classifier(path)
    save_encoder(path, classifier.encoder, {})
    with pytest.raises(DataError, match="not a clip-classifier"):
        load_classifier(path)
