//! Changes that `top` makes, and how they are undone.

use super::*;

#[test]
fn no_single_letter_changes_class_or_memory() {
    for key in (' '..='~').filter(|key| !"+=-w".contains(*key)) {
        let mut view = view(2, 0);
        let action = press(&mut view, KeyCode::Char(key));
        let expected = if key == 'q' {
            Action::Quit
        } else {
            Action::Nothing
        };
        assert_eq!(action, expected, "{key}");
    }
    // Nothing but y moves memory, and nothing but l, s and b sets a class.
    for key in (' '..='~').filter(|key| *key != 'y') {
        assert_eq!(
            type_in(&mut view(2, 0), &format!("z{key}")),
            Action::Nothing
        );
    }
    for key in (' '..='~').filter(|key| !"lsb".contains(*key)) {
        assert_eq!(
            type_in(&mut view(2, 0), &format!("c{key}")),
            Action::Nothing
        );
    }
}

#[test]
fn class_change_is_asked_for_and_undone() {
    let mut view = view(2, 0);
    type_in(&mut view, "jc");
    assert!(picture(&view, 50, 24).contains("a-training-wi…: l latency  s standard  b batch"));
    let Action::Change(change) = type_in(&mut view, "s") else {
        panic!("no change");
    };
    let class = |class| {
        What::Spec(SpecChange {
            class: Some(class),
            ..SpecChange::default()
        })
    };
    assert_eq!(
        (&*change.name, &change.what),
        ("a-training-with-a-long-name", &class(Class::Standard))
    );
    view.changed(*change);
    assert!(
        picture(&view, 120, 24)
            .contains("class batch is now standard, also at its next start. u undoes it.")
    );
    let Action::Change(undo) = type_in(&mut view, "u") else {
        panic!("no undo");
    };
    assert_eq!(
        (&*undo.name, &undo.what),
        ("a-training-with-a-long-name", &class(Class::Batch))
    );
    view.changed(*undo);
    // What undoes is not undone.
    assert_eq!(type_in(&mut view, "u"), Action::Nothing);
    assert!(picture(&view, 80, 24).contains("nothing to undo"));
}

#[test]
fn weight_and_memory_changes_have_inverses() {
    let mut view = view(2, 0);
    let Action::Change(change) = type_in(&mut view, "+") else {
        panic!("no change");
    };
    let weight = |weight| {
        What::Spec(SpecChange {
            weight: Some(weight),
            ..SpecChange::default()
        })
    };
    assert_eq!(
        (change.what, change.inverse),
        (weight(2.0), Some(weight(1.0)))
    );
    let Action::Change(change) = type_in(&mut view, "zy") else {
        panic!("no change");
    };
    assert_eq!(
        (change.what, change.inverse),
        (What::Sleep, Some(What::Wake))
    );
    let Action::Change(change) = type_in(&mut view, "w") else {
        panic!("no change");
    };
    assert_eq!(
        (change.what, change.inverse),
        (What::Wake, Some(What::Sleep))
    );
}
