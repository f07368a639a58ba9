//! The last of many.

use std::{collections::VecDeque, ops::Deref};

/// The last `MOST` that came, the oldest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ring<T, const MOST: usize>(VecDeque<T>);

impl<T, const MOST: usize> Ring<T, MOST> {
    /// Keeps one more, in place of the oldest if there are as many as there may be.
    pub fn push(&mut self, item: T) {
        self.0.push_back(item);
        self.keep(MOST);
    }

    /// Keeps no more than so many of the last.
    pub fn keep(&mut self, most: usize) {
        self.0.drain(..self.0.len().saturating_sub(most));
    }

    /// Takes the last.
    pub fn pop(&mut self) -> Option<T> {
        self.0.pop_back()
    }

    /// Takes all that are `so`.
    pub fn take(&mut self, mut so: impl FnMut(&T) -> bool) -> Vec<T> {
        let (taken, kept) = self.0.drain(..).partition(|it| so(it));
        self.0 = kept;
        VecDeque::into(taken)
    }

    /// Takes the one at this place.
    pub fn remove(&mut self, at: usize) -> Option<T> {
        self.0.remove(at)
    }

    /// All, to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut()
    }
}

impl<T, const MOST: usize> Default for Ring<T, MOST> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T, const MOST: usize> Deref for Ring<T, MOST> {
    type Target = VecDeque<T>;

    fn deref(&self) -> &VecDeque<T> {
        &self.0
    }
}

impl<T, const MOST: usize> Extend<T> for Ring<T, MOST> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, items: I) {
        items.into_iter().for_each(|it| self.push(it));
    }
}

impl<T, const MOST: usize> FromIterator<T> for Ring<T, MOST> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let mut all = Self::default();
        all.extend(items);
        all
    }
}

impl<'a, T, const MOST: usize> IntoIterator for &'a Ring<T, MOST> {
    type Item = &'a T;
    type IntoIter = std::collections::vec_deque::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_are_kept_in_order() {
        let mut ring: Ring<u32, 3> = (0..5).collect();
        assert_eq!(*ring, [2, 3, 4]);
        assert_eq!(ring.take(|it| it % 2 == 0), [2, 4]);
        ring.extend([5, 6]);
        assert_eq!(ring.pop(), Some(6));
        ring.keep(1);
        assert_eq!(*ring, [5]);
    }
}
